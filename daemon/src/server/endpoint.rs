//! Making endpoints of greeted connections.

use vmove_fabric::{Endpoint, FabricError};

/// Makes an endpoint where no connection waits behind it: both ends may exchange messages.
pub(super) async fn make_blocking<F>(make: F) -> Result<Box<dyn Endpoint>, String>
where
    F: FnOnce() -> Result<Box<dyn Endpoint>, FabricError> + Send + 'static,
{
    match tokio::task::spawn_blocking(make).await {
        Ok(Ok(endpoint)) => Ok(endpoint),
        Ok(Err(error)) => Err(vmove_types::problem::chain(&error)),
        Err(error) => Err(error.to_string()),
    }
}
