"""Acceptance on one GPU: every claim that no CPU can test, in one command of some minutes.

    python -m benchmarks.gpu --minutes 9 --json benchmarks/results/gpu-h100.json

The command needs this repository, Python with PyTorch and transformers, and a folder of wheels for
the packages that the machine lacks: `--wheels-line` prints the command that downloads the wheels,
`--wheels FOLDER` installs them for one call. Parts run in the order of what they decide. Every part
is a process with a time limit, and every row is written as soon as the part has measured it. A
second call with the same file runs the rows that are missing, then those that failed. Without a GPU
the parts run small, on the CPU: this tests the script, not the product, and such figures are not
committed.

| module | content |
| --- | --- |
| `parts` | the list of parts, their rows, time limits and aims |
| `results` | the result file, its rows, the table at the end |
| `runner` | one process per part, its limit, its log |
| `child` | the inside of such a process |
| `wheels` | the packages that may be missing |
| `product` | every call into dilocox that is not its command line |
| `sizes` | models and run files at three scales |
| `staged` | a process group for several ranks on one GPU |
| `tables` | the table of docs/measured.md |
"""
