"""Data sets, the experiment runner, sweeps and reports."""
