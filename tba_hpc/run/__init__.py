"""Files that a run keeps on disk, except the format of shards. Imports neither torch nor h5py."""
