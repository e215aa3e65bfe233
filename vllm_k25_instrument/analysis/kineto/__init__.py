"""Chrome traces of Kineto (torch.profiler), read as a stream.

`blocks` inflates, `document` finds the events in the JSON, `rows` decodes them, `columns` turns them into integers,
`owners` says which process drives which GPU, `assembly` makes captures.
"""
