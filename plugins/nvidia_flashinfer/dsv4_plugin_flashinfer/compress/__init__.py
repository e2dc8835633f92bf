"""The compressor in CuTe DSL: entries of plain rows, stored as they are pooled, and states.

The definition is `dsv4core.ops.compress`.
"""
