"""The output law: enumerated exactly, bisected in floating point, counted through real services."""
