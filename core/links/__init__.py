"""Links between the processes of one group: plain ones on a machine, keyed ones over hosts. Torch-free."""
