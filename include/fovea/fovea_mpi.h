/* Ranks that are processes of MPI, for fovea_distributed.h: a library of its own, libfovea_mpi, which links MPI and not libfovea.
 *
 * Messages lie in memory of CPUs. Steps never wait for longer than the deadline: a rank that is silent, stops, or sends another number of
 * bytes than was expected is an error on the others, which names it. After an error the transport is of no more use, and messages
 * may still be under way, so the program does best to end. */
#ifndef FOVEA_FOVEA_MPI_H
#define FOVEA_FOVEA_MPI_H

#include "fovea/fovea_distributed.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* Ranks of a communicator: `communicator` is the address of an MPI_Comm (not an intercommunicator), which stays the caller's; all of its
 * ranks call this, and get a communicator of their own with the same ranks. NULL: all processes of the program; then MPI is
 * initialised where it is not, with MPI_THREAD_MULTIPLE where MPI has it, and whoever initialised it here finalises it with the close.
 * deadline_ms: how long a rank waits for another; 0: 60,000.
 * Calls come from one thread, the one that opens, but for `stop`: where MPI was not initialised with MPI_THREAD_MULTIPLE, a stop from
 * another thread reaches the other ranks with this rank's next call, or its close.
 * *transport is to be closed. Where this fails, fovea_mpi_last_error() says why. */
FOVEA_API fovea_status fovea_mpi_transport_open(const void* communicator, int64_t deadline_ms,
                                                fovea_transport* transport) FOVEA_NOEXCEPT;
/* Waits for messages on their way, at most as long as the deadline. After an error MPI is not finalised: that would wait for ranks that
 * are gone. May be called twice. */
FOVEA_API void fovea_mpi_transport_close(fovea_transport* transport) FOVEA_NOEXCEPT;
/* What went wrong in the last open of this thread; "": nothing. */
FOVEA_API const char* fovea_mpi_last_error(void) FOVEA_NOEXCEPT;

#if defined(__cplusplus)
}
#endif
#endif /* FOVEA_FOVEA_MPI_H */
