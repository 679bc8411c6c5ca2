"""Making a draft for a target: sampling text from it, training a student, writing a folder."""
