"""Opinion: from what was seen to a verdict. Never imports torch or h5py."""
