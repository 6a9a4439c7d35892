"""The program that measures a device type: layers, collectives, transfers and memory.

Run as ``python -m amp_ray.training.profiling JOB.json`` on every rank, one rank per slot of a
host (or per host, to measure the links between them), with the same environment as a trial. All
ranks measure the same thing at the same time, as they would in training. What was measured
goes out as an event at once; ``result.json`` only says that the run came to its end.

=============  ===================================================================
event          values
=============  ===================================================================
``hardware``   ``hardware``, ``versions``
``begin``      ``tp``, ``micro_batch_size``, ``layer``: this is measured next
``layer``      the same, with seconds and bytes
``slice``      the same of a slice: also ``tokens`` and, before them, ``context``
``oom``        the same: it does not fit, nor does anything larger at this tp
``link``       ``what``, ``num_ranks``, ``bytes``, ``seconds``
``step``       ``host_s_per_micro_batch``, ``host_s_per_iteration``, ``memory_bytes_per_s``
=============  ===================================================================

Layers are named by their index in the model's own list; the loss behind the last layer of a
language model by the number of layers.
"""
