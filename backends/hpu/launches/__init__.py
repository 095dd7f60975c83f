"""The programs of the HPU backend: host arrays, copies, graphs and compiled regions."""
