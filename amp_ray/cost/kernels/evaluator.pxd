from amp_ray.cost.kernels.rings cimport RingTable, seconds_at
