//! Leases that a caller may see.

use crate::access::Caller;
use crate::bridge::{BridgeError, View};
use crate::lease::{Lease, LeaseId};

/// A lease that the caller may see. Others are to it as if there were none.
pub(super) fn visible<'a>(view: &'a View, caller: &Caller, id: &LeaseId) -> Result<&'a Lease, BridgeError> {
    let lease = &view.lease(id)?.lease;
    if caller.may_use(&lease.holder) { Ok(lease) } else { Err(BridgeError::UnknownLease(id.clone())) }
}
