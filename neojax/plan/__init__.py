"""What a machine would do, without the machine: `python -m neojax.plan` and `plan.simulate`."""
