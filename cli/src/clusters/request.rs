//! Requests for virtual clusters, as texts in one of their formats.

use vmove_bridge_types::request_text::{RequestFormat, RequestText};

use super::input::read;
use crate::args::bridge::RequestArgs;
use crate::failure::Failure;

/// The text and its format.
pub fn text(request: &RequestArgs) -> Result<RequestText, Failure> {
    let (text, guess) = match (&request.file, &request.text) {
        (Some(path), _) => {
            let end = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
            let guess = match end.as_str() {
                "toml" => Some(RequestFormat::Toml),
                "yaml" | "yml" => Some(RequestFormat::Yaml),
                "json" => Some(RequestFormat::Flavor),
                _ => None,
            };
            (read(path)?, guess)
        }
        (None, Some(text)) => (text.clone(), Some(RequestFormat::Instance)),
        (None, None) => return Err(Failure::bad_request("expected a file or --text")),
    };
    let format = request.format.or(guess).ok_or_else(|| {
        Failure::bad_request(
            "the format cannot be guessed from the file name: give --format instance, flavor, toml or yaml",
        )
    })?;
    Ok(RequestText { format, text, count: request.count })
}
