"""What tools/experiments.py is made of: one module per experiment, above the parts that they share."""
