//! `vmove place`.

use hyper::Method;
use serde_json::{Value, json};

use super::args::{PlaceArgs, RequestArgs};
use super::client::Client;
use super::{Said, read, show};
use crate::api::problem::Problem;
use crate::api::types::RequestFormat;

pub async fn run(args: PlaceArgs, as_json: bool) -> Said {
    let client = Client::new(&args.at)?;
    let mut body = body(&args.request)?;
    body["holder"] = json!(args.holder);
    body["ttl_ms"] = json!(args.ttl);
    body["what_if"] = json!(args.what_if || args.explain);
    body["explain"] = json!(args.explain);
    if let Some(id) = &args.id {
        body["id"] = json!(id);
    }
    let answer = client.ask(Method::POST, "/v1/leases", Some(&body)).await?;
    if let Some(why) = answer["refused"].as_str() {
        show(&answer, as_json, |answer| super::show::explanation(&answer["explanation"]))?;
        return Err(Problem::new(crate::api::problem::Code::NoRoom, why));
    }
    show(&answer, as_json, people)
}

fn people(answer: &Value) -> String {
    let mut out = String::new();
    if answer["lease"].is_object() {
        out.push_str(&super::show::lease(&answer["lease"]));
    } else {
        out.push_str(&super::show::assignments(&answer["placement"]["assignments"]));
    }
    out.push_str(&super::show::score(&answer["placement"]["score"]));
    if answer["explanation"].is_object() {
        out.push_str(&super::show::explanation(&answer["explanation"]));
    }
    out
}

/// A request as the bridge wants it: the text, in its spelling.
pub fn body(request: &RequestArgs) -> Result<Value, Problem> {
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
        (None, None) => return Err(Problem::bad("expected a file or --text")),
    };
    let format = request.format.or(guess).ok_or_else(|| {
        Problem::bad("the name of the file does not tell what it is written in: give --format instance, flavor, toml or yaml")
    })?;
    let mut body = json!({ "text": { "format": format, "text": text, "count": request.count } });
    if let Some(cluster) = &request.cluster {
        body["cluster"] = json!(cluster);
    }
    Ok(body)
}
