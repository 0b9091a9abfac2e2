"""What compiled kernels say of themselves: how long they take, whether they wait enough, whether they race."""
