"""Compression: one fp32 tensor to a payload of exactly known size, and back.

`codec` gives a codec by name; `frame` wraps a payload for the wire. Nothing here knows sites,
rounds or networks. Decoding is a pure function of the payload: the same bytes on every machine.
"""
