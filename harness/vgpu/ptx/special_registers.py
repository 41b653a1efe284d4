"""NumPy expressions that compute the special registers.

Their variables: the thread's linear index `tid` in its block and `lane` in its warp; the block indices
`ctaid_x` ...; the sizes `ntid_x` ..., `nctaid_x` ... and `cluster_nctaid_x` ...; and shared memory sizes in
bytes.
"""

from __future__ import annotations

EXPRESSIONS = {
    "tid_x": "tid % ntid_x", "tid_y": "tid // ntid_x % ntid_y", "tid_z": "tid // (ntid_x * ntid_y)",
    "laneid": "lane", "warpid": "tid >> u4(5)", "nwarpid": "(ntid_x * ntid_y * ntid_z + u4(31)) >> u4(5)",
    "lanemask_eq": "u4(1) << lane", "lanemask_lt": "(u4(1) << lane) - u4(1)",
    "lanemask_le": "(u4(2) << lane) - u4(1)", "lanemask_gt": "~((u4(2) << lane) - u4(1))",
    "lanemask_ge": "~((u4(1) << lane) - u4(1))",
    "smid": "(ctaid_x + nctaid_x * (ctaid_y + nctaid_y * ctaid_z)) % u4(132)", "nsmid": "u4(132)",
    "cluster_ctarank": "ctaid_x % cluster_nctaid_x + cluster_nctaid_x * (ctaid_y % cluster_nctaid_y"
                       " + cluster_nctaid_y * (ctaid_z % cluster_nctaid_z))",
    "cluster_nctarank": "cluster_nctaid_x * cluster_nctaid_y * cluster_nctaid_z",
    "is_explicit_cluster": "cluster_nctaid_x * cluster_nctaid_y * cluster_nctaid_z > u4(1)",
    "dynamic_smem_size": "dynamic_smem_size", "total_smem_size": "total_smem_size", "aggr_smem_size": "u4(0)",
    "reserved_smem_offset_begin": "u4(0)", "reserved_smem_offset_end": "u4(1024)",
    "clock": "u4(0)", "clock_hi": "u4(0)", "clock64": "u8(0)",
    "globaltimer": "u8(0)", "globaltimer_lo": "u4(0)", "globaltimer_hi": "u4(0)", "gridid": "u8(0)",
}  # fmt: skip
for _axis in "xyz":
    EXPRESSIONS |= {
        name: name
        for name in (f"ntid_{_axis}", f"nctaid_{_axis}", f"ctaid_{_axis}", f"cluster_nctaid_{_axis}")
    }
    EXPRESSIONS |= {
        f"clusterid_{_axis}": f"ctaid_{_axis} // cluster_nctaid_{_axis}",
        f"nclusterid_{_axis}": f"nctaid_{_axis} // cluster_nctaid_{_axis}",
        f"cluster_ctaid_{_axis}": f"ctaid_{_axis} % cluster_nctaid_{_axis}",
    }
SPECIAL_REGISTERS = {name.removesuffix("_x") for name in EXPRESSIONS if not name.endswith(("_y", "_z"))}
"""PTX names of the special registers, without `.x`, `.y` and `.z`."""
