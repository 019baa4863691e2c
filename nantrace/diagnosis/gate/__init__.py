"""Whether a run may go on: a promotion rule over the steps of its trace."""
