"""The KV data plane: moves KV bytes from a sender's blocks into a receiver's. It knows no model and no control message.

`stream_*` is the project's own TCP stream (any line, any page size), `nixl_*` writes straight into the receiver's
pool (equal pages, same datacenter); both speak the interface of `interface`.
"""
