"""What a run keeps on disk, apart from the format of shards. Imports neither torch nor h5py."""
