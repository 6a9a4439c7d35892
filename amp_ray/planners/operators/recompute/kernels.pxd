# What compiled code of other modules takes from kernels.py.

cdef class Relaxation:
    cdef long long[::1] hints
    cdef const double[:, ::1] charged
    cdef const double[:, :, ::1] levels
    cdef const double[:, :, :, :, ::1] rest
    cdef const double[:, :, :, :, ::1] layers
    cdef const double[:, :, :, :, ::1] head

cdef double relaxed_s(
    double excess,
    double in_flight,
    double known_s,
    Relaxation tables,
    Py_ssize_t row,
    (long long, long long, long long, long long) where,
)
