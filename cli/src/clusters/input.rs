//! What commands read: files, and where the bridge is.

use std::path::Path;

use vmove_client::bridge::Bridge;

use crate::args::clusters::Where;
use crate::failure::Failure;

/// A client of the bridge that the arguments name.
pub fn bridge(at: &Where) -> Result<Bridge, Failure> {
    let token = at.token_file.as_deref().map(token).transpose()?;
    Ok(Bridge::connect(at.bridge.clone(), token.as_deref()))
}

fn token(path: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::bad_request(format!("token file {}: {e}", path.display())))?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// Reads a file, or standard input for `-`.
pub fn read(path: &Path) -> Result<String, Failure> {
    let text = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(path)
    };
    text.map_err(|e| Failure::bad_request(format!("could not read {}: {e}", path.display())))
}
