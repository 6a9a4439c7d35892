"""The program that measures a device type: layers, collectives, transfers and memory.

The training program runs it for the job file of a profile, on one rank per slot of a host (or per
host, to measure the links between them). All ranks measure the same thing at the same time, as they
would in training. Each measurement is sent as an event immediately; ``result.json`` only confirms
the end of the run.

=============  ===================================================================
event          values
=============  ===================================================================
``hardware``   ``hardware``, ``versions``
``begin``      ``tp``, ``micro_batch_size``, ``layer``: the point that is measured next
``layer``      the keys of ``begin``, seconds and bytes
``slice``      the keys of ``layer``, the slice's ``tokens``, and earlier tokens as ``context``
``oom``        a point that does not fit in memory; larger ones at this tp do not fit, either
``link``       ``what``, ``num_ranks``, ``bytes``, ``seconds``
``step``       ``host_s_per_micro_batch``, ``host_s_per_iteration``, ``memory_bytes_per_s``
=============  ===================================================================

``layer`` is the index in the model's list of layers; the number of layers stands for the loss
of a language model.
"""
