"""All-reduce of small messages over peer memory: each rank reads the messages of the others directly."""
