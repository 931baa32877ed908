// The kernels of grouped streams as a library for tests without a GPU: one geometry, by the same -D options as on a
// device.
#include "../kernels/encode_groups.cu"
#include "run.h"

extern "C" {

void set_backwards(int backwards) { dquant_simt::block().backwards = backwards; }

DQ_RUN(dquant_group_head, GroupEncodeParams)
DQ_RUN(dquant_group_means, GroupEncodeParams)
DQ_RUN(dquant_encode_groups, GroupEncodeParams)

long shared_bytes(const dquant::GroupTables* tables) { return dquant::GroupRoom(*tables, GroupPlan::substreams).bytes(); }
long warp_bytes(const dquant::GroupTables* tables) { return dquant::group_warp_bytes(*tables, GroupPlan::substreams); }
}
