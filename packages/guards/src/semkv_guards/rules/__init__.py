"""The rules, a module for each kind. `registry` has them in the order in which they are asked."""
