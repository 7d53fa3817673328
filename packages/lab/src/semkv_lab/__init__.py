"""Experiments with semkv: data sets, runs, metrics, sweeps, reports, and how far approximate hits can be trusted."""
