"""Many runs from one file, each in a process of its own, one row a run."""
