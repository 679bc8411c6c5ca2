"""How well a draft fits a target: acceptance by position and temperature, costs of encodings."""
