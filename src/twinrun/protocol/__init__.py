"""What ranks and host share: the job and the result of each workload, measurements, formulas."""
