"""The trace file. The only package that imports h5py."""
