// All kernels of one instruction set. Compiled once per instruction set with its flags and OCTAVO_ISA (its name);
// the sources (*.inl) know registers only through simd.h. Nothing here may be shared between the copies.
#include "kernels.h"

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

#include "matmul_tiles.inl"

#include "kv_ahead.inl"

#include "matmul_f32.inl"
#include "matmul_int8.inl"

#include "matmul_grouped.inl"

#include "elementwise.inl"
#include "argmax.inl"
#include "softmax_blocks.inl"
#include "norm_rope.inl"
#include "ssm.inl"
#include "quantizer.inl"
#include "write_kv.inl"

#include "attention_tiles.inl"
#include "attention_ahead.inl"
#include "attention_work.inl"
#include "attention_int8.inl"

#include "paged_attention.inl"

#define OCTAVO_STRING(x) #x
#define OCTAVO_NAME(x) OCTAVO_STRING(x)

extern const Kernels table;
const Kernels table = {
    OCTAVO_NAME(OCTAVO_ISA), quantize_rows, matmul_i8,     matmul_grouped, matmul_f32,  rms_norm,
    head_norm,               rope_table,    rope,          add,            scale,       softcap,
    argmax,                  join_argmax,   softmax_blocks, embed_f32,     embed_f16,   embed_grouped,
    write_kv,                attention_scratch_bytes,       paged_attention, merge_attention,
    conv1d,                  ssm_scan,      gated_rms_norm,
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
