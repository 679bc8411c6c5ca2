"""`specmesh bench`: the whole stack beside transformers, in one run on one machine.

`suite.py` says what is compared, `reference_model.py` and `load.py` take the times, `rounds.py`
reads what traces know about rounds, `report.py` prints. Nothing here is a timed test.
"""
