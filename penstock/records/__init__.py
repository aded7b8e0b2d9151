"""Records that processes exchange, one per file.

``Job`` is what a producer admits, ``Sample`` one answer while a worker makes it, ``SampleMeta`` the record of a
committed sample that the buffer works with, ``Manifest`` the record of one cut batch, ``Publication`` one version
of the weights.
"""
