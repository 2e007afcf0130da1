"""How annotations are checked in tests: beartype, with an int where a float is wanted (PEP 484)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
