//! Requests for virtual clusters, as texts in one of their formats.

use std::path::{Path, PathBuf};

use vmove_bridge_types::problem::Code;
use vmove_bridge_types::request_text::{RequestFormat, RequestText};
use vmove_types::problem::ProblemCode;

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

/// The file of a request. The bridge, which reads the text, does not know its name.
pub struct Origin(Option<PathBuf>);

impl Origin {
    pub fn of(request: &RequestArgs) -> Self {
        Self(request.file.clone().filter(|path| path != Path::new("-")))
    }

    /// Why the request failed, with the name of its file if that is what is wrong.
    pub fn failed(&self, failure: impl Into<Failure>) -> Failure {
        let failure = failure.into();
        match &self.0 {
            Some(path) if failure.code == Code::BadRequest.word() => {
                Failure { message: format!("{}: {}", path.display(), failure.message), ..failure }
            }
            _ => failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_in_a_file_is_told_with_its_name() {
        let of = |file: Option<&str>| Origin(file.map(PathBuf::from));
        let wrong = || Failure::bad_request("line 3 column 1: unknown field `cuont`");
        let said = of(Some("/c.toml")).failed(wrong());
        assert_eq!(said.message, "/c.toml: line 3 column 1: unknown field `cuont`");
        assert_eq!(said.code, wrong().code);
        assert_eq!(of(None).failed(wrong()), wrong());
        let full = || Failure::new(Code::NoRoom, "no room");
        assert_eq!(of(Some("/c.toml")).failed(full()), full());
    }
}
