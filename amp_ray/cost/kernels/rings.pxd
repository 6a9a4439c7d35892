"""C types of `rings`: fields of its classes, and functions for other compiled modules."""

cimport cython


cpdef double curve_at(double[::1] row, double num_bytes) noexcept
cpdef double seconds_at(double[:, ::1] curves, long long number, double num_bytes) noexcept
cdef Py_ssize_t _place(double num_bytes) noexcept
cdef double _beyond(double num_bytes, Py_ssize_t place) noexcept
cdef double _ratio(long long number, double divisor) noexcept
cdef long long _depth(long long num_nodes) noexcept
cdef long long _most_in_a_node(long long num_ranks, long long num_nodes) noexcept
cdef long long _height(long long word, long long shift) noexcept
cdef long long _mixed(long long hashed, long long word) noexcept
cdef long long _whole(double bytes_per_s) noexcept


@cython.final
cdef class CollectiveTimes:
    cdef long long num_ranks
    cdef long long num_nodes
    cdef double within_bytes_per_s
    cdef double network_bytes_per_s
    cdef long long within
    cdef long long network
    cdef double within_step_s
    cdef double network_step_s
    cdef double slower_s
    cdef long long generation
    cdef double switch_bytes_per_s
    cdef bint has_ll
    cdef bint has_ll128
    cdef double latency_scale
    cdef double rate_scale
    cdef bint has_pat
    cdef double[::1] seconds  # by size, then seconds per byte beyond: the curve that is written
    # Tables of `nccl`, by algorithm, protocol, and size or generation
    cdef double[::1] sizes
    cdef double[:, :, ::1] hop_s
    cdef double[:, ::1] start_s
    cdef double[:, ::1] share
    cdef double[:, ::1] correction
    cdef double[::1] overhead_s
    cdef double[:, ::1] most_ll
    cdef double[::1] plateau
    cdef double[::1] switch_share
    cdef void write_reduce(self) noexcept
    cdef void write_gather(self) noexcept
    cdef void _begin(self) noexcept
    cdef void _end(self) noexcept
    cdef void _try_ring(self, long long trips) noexcept
    cdef double _plateau(self, Py_ssize_t protocol) noexcept
    cdef void _try_tree(self) noexcept
    cdef void _try_switch(self) noexcept
    cdef void _try_pat(self) noexcept
    cdef void _try(self, double latency, double sent, double rate, Py_ssize_t protocol, Py_ssize_t correction) noexcept
    cdef void _try_line(self, double latency, double s_per_byte) noexcept
    cdef void _lower(self, Py_ssize_t index, double seconds) noexcept
    cdef bint _has(self, Py_ssize_t protocol) noexcept
    cdef double _ring_s(self, Py_ssize_t protocol) noexcept
    cdef double _within_s(self, Py_ssize_t way, Py_ssize_t protocol) noexcept
    cdef double _network_s(self, Py_ssize_t way, Py_ssize_t protocol) noexcept


@cython.final
cdef class RingTable:
    # By number of the path; see `Path`
    cdef readonly double[::1] bytes_per_s
    cdef readonly double[::1] step_s
    cdef readonly double[::1] tree_s
    cdef readonly long long[::1] num_nodes
    cdef readonly long long[::1] has_curves  # whether collectives take the curves' times
    # Shape ``(num_paths, num_sizes + 1)``: seconds by size, then seconds per byte beyond
    cdef readonly double[:, ::1] reduce_s
    cdef readonly double[:, ::1] gather_s
    cdef readonly long long num_paths
    cdef dict objects  # paths that were asked for
    # What paths are told apart by; the row after the last path is that of the ring looked up
    cdef double[:, ::1] figures
    cdef long long[:, ::1] traits
    cdef long long[::1] slots  # hash table of the paths' numbers, -1 where it is empty
    # Of the cluster
    cdef long long num_kinds
    cdef bint has_host_links
    cdef long long[::1] node_of_device
    cdef long long[::1] host_of_device
    cdef long long[::1] kind_of_node
    cdef long long[::1] host_of_node
    # By kind of node: within its nodes, and then within a host of a rack, shape ``(2, num_kinds)``
    cdef double[:, ::1] inside_bytes_per_s
    cdef double[:, ::1] inside_step_s
    cdef double[::1] num_hosts
    cdef long long[::1] links
    cdef long long[::1] board  # of its measured times; -1 if it has none
    cdef double[:, ::1] between_bytes_per_s
    cdef double[:, ::1] between_step_s
    cdef long long[:, ::1] joined_links
    cdef double[:, :, :, ::1] measured_s
    # Number of the path within a node, by kind, whether in a host of a rack, and ranks; -1 before
    cdef long long[:, :, ::1] inside_path
    cdef CollectiveTimes times
    # Of the rings in question: nodes of each, ascending, ring after ring, and where they begin
    cdef long long[::1] visited
    cdef long long[::1] begins
    cdef long long[::1] in_host  # 1 for a ring in one host of a rack with links of its own
    cdef long long stamp  # number of the ring that visits nodes now, among all rings ever
    cdef long long[::1] stamps  # stamp of the last ring that visited each node
    # Rings that leave each host, and then those that use the own PCIe of each node
    cdef double[::1] sharers
    cpdef void at_once(self, long long[::1] members, long long[::1] first, Py_ssize_t num_rings, long long[::1] paths) except *
    cdef void _make_space(self, Py_ssize_t num_rings, long long num_members) except *
    cdef void _visit(self, long long[::1] members, long long first, long long end, Py_ssize_t ring) noexcept
    cdef void _insert(self, long long node, long long begin, long long end) noexcept
    cdef long long _are_in_one_host(self, long long[::1] members, long long first, long long end) noexcept
    cdef bint _leaves_host(self, Py_ssize_t ring) noexcept
    cdef long long _shared(self, long long node, bint leaves_host) noexcept
    cdef void _add_sharers(self, Py_ssize_t ring, double number) noexcept
    cdef bint _is_like_last(self, Py_ssize_t ring) noexcept
    cdef Py_ssize_t _path_of(self, Py_ssize_t ring, long long num_ranks) except? -1
    cdef void _write_inside(self, long long kind, long long in_host, long long num_ranks) noexcept
    cdef void _write_between(self, Py_ssize_t ring, long long num_ranks) noexcept
    cdef double _share(self, long long node, bint leaves_host, double spread) noexcept
    cdef void _clear_figures(self, long long num_ranks, long long num_nodes) noexcept
    cdef void _add_hop(self, long long one, long long other, double share) noexcept
    cdef void _lower(self, Py_ssize_t column, double figure) noexcept
    cdef void _raise(self, Py_ssize_t column, double figure) noexcept
    cdef void _join(self, Py_ssize_t ring) noexcept
    cdef Py_ssize_t _number(self) except? -1
    cdef long long _first_slot(self, long long row) noexcept
    cdef bint _are_alike(self, long long one, long long other) noexcept
    cdef void _make_room(self, Py_ssize_t room) except *
    cdef void _occupy(self, long long number) noexcept
    cdef void _write_path(self, long long row) noexcept
    cdef bint _has_times(self, long long row) noexcept
    cdef void _set_group(self, long long row, double within_bytes_per_s) noexcept
    cdef void _set_protocols(self, long long links) noexcept
    cdef void _write_curves(self, long long row) noexcept
    cdef void _keep(self, long long row, double[:, ::1] curves) noexcept
    cdef bint _take_measured(self, long long row, Py_ssize_t collective, double[:, ::1] curves) noexcept
