# base/ipc.
sluice_test(NAME ipc_ring_test SUITE unit SOURCES ipc_ring_test.cc LIBS sluice_ipc THREADS)
sluice_test(NAME ipc_channel_test SUITE unit SOURCES ipc_channel_test.cc LIBS sluice_ipc)
sluice_test(NAME ipc_view_test SUITE unit SOURCES ipc_view_test.cc LIBS sluice_ipc)
