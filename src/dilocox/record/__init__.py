"""The record: the signed history of a run, which anybody can check without trusting the operators.

`log` has digests, signed statements, the transparency log and the content-addressed store.
`writer` is the code with which coordinator and sites write the record during a run. `verify`
checks a record and replays every outer step from it.
"""
