from amp_ray.cost.rings cimport RingTable
