"""Links between the processes of one group: plain ones on a machine, authenticated ones over hosts. Torch-free."""
