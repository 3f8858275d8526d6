//! What commands read: files, and where the bridge is.

use std::path::Path;

use vmove_client::Endpoint;
use vmove_client::bridge::Bridge;

use crate::args::bridge::Where;
use crate::failure::Failure;

/// A client of the bridge that the arguments name.
pub fn bridge(at: &Where) -> Result<Bridge, Failure> {
    let token = at.token_file.as_deref().map(token).transpose()?;
    let bridge = Bridge::connect(at.bridge.clone(), token.as_deref());
    match (&at.bridge, &at.ca_file) {
        (Endpoint::Tls(_), None) => Err(Failure::bad_request(format!(
            "{} needs the certificate authority that vouches for it: give --ca-file or VBRIDGE_CA_FILE",
            at.bridge
        ))),
        (Endpoint::Tls(_), Some(file)) => bridge.with_authority(file).map_err(Failure::bad_request),
        _ => Ok(bridge),
    }
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
