//! What libibverbs calls through the longer table that an opened device has by now (`verbs_get_ctx_op` of its header): `rdma-sys`
//! looks for the mark of that table in 32 bits where it has 64, and so never finds it.

use std::mem::{offset_of, size_of};

use rdma_sys::{
    ib_uverbs_advise_mr_advice, ibv_context, ibv_device_attr_ex, ibv_odp_transport_cap_bits, ibv_sge,
    verbs_context,
};

use super::device::{Device, Domain};

/// `IBV_ODP_SUPPORT`: the device does on-demand paging at all.
const ON_DEMAND: u64 = 1;
/// A work request's length has 32 bits.
const MOST_ADVISED: u64 = 1 << 30;

/// The longer table, if the field at `offset` is in it.
fn table(context: *const ibv_context, offset: usize) -> Option<*const verbs_context> {
    // SAFETY: rule 1: the device is open.
    let mark = unsafe { (*context).abi_compat };
    if mark.addr() != usize::MAX {
        return None;
    }
    let table = context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
    // SAFETY: rule 7: it has the mark. The table grows at its beginning, so its last fields are always there.
    let size = unsafe { (*table).sz };
    (size >= size_of::<verbs_context>() - offset).then_some(table)
}

impl Device {
    /// Whether a peer's READs on a reliable connection reach memory that is not pinned: then the device asks the kernel for pages.
    pub(in crate::verbs) fn reads_on_demand(&self) -> bool {
        let Some(table) = table(self.as_ptr(), offset_of!(verbs_context, query_device_ex)) else {
            return false;
        };
        // SAFETY: rule 7.
        let Some(query) = (unsafe { (*table).query_device_ex }) else { return false };
        // SAFETY: rule 3.
        let mut found: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
        // SAFETY: rules 1, 3 and 7.
        let result = unsafe {
            query(self.as_ptr(), std::ptr::null(), &raw mut found, size_of::<ibv_device_attr_ex>())
        };
        let reads = ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_READ.0;
        let caps = &found.odp_caps;
        result == 0 && caps.general_caps & ON_DEMAND != 0 && caps.per_transport_caps.rc_odp_caps & reads != 0
    }
}

/// Asks the device to bring pages of an on-demand region in before they are read, in the background. A device that does not take
/// advice asks for them when they are read.
pub(super) fn bring_in(domain: &Domain, addr: u64, len: u64, lkey: u32) {
    let context = domain.device().as_ptr();
    let Some(table) = table(context, offset_of!(verbs_context, advise_mr)) else { return };
    // SAFETY: rule 7.
    let Some(advise) = (unsafe { (*table).advise_mr }) else { return };
    let advice = ib_uverbs_advise_mr_advice::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH;
    let mut at = 0;
    while at < len {
        let part = (len - at).min(MOST_ADVISED);
        let mut piece = ibv_sge { addr: addr + at, length: u32::try_from(part).unwrap_or(u32::MAX), lkey };
        // SAFETY: rules 1, 3 and 7.
        if unsafe { advise(domain.as_ptr(), advice, 0, &raw mut piece, 1) } != 0 {
            return;
        }
        at += part;
    }
}
