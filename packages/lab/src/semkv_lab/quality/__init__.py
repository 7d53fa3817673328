"""How far approximate hits can be trusted: labelled pairs, streams, calibration, figures."""
