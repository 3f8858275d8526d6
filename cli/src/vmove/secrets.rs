//! Secrets in a command line of QEMU, which every user of the host can read in `/proc/PID/cmdline`.

/// The options that hold a secret itself, as the words to show: without the secret.
pub fn in_the_open(command_line: &[String]) -> Vec<String> {
    let shown = |word: &String| {
        let key = if word.trim_start().starts_with('{') { in_json(word) } else { in_options(word) };
        key.or_else(|| in_address(word))
    };
    command_line.iter().filter_map(shown).collect()
}

/// `secret,id=s0,data=letmein`, `port=5900,password=letmein`
fn in_options(word: &str) -> Option<String> {
    let of_secret = word.starts_with("secret,") || word.contains("qom-type=secret,");
    let keys = word.split(',').filter_map(|part| part.split_once('='));
    let open = |(key, value): &(&str, &str)| match *key {
        "data" => of_secret,
        // `-vnc :1,password=on` only says that there is one.
        "password" => !value.is_empty() && !["on", "off"].contains(value),
        _ => false,
    };
    keys.into_iter().find(open).map(|(key, _)| format!("{key}=…"))
}

fn in_json(word: &str) -> Option<String> {
    let value: serde_json::Value = serde_json::from_str(word).ok()?;
    let is_secret = value["qom-type"] == "secret" && value["data"].is_string();
    is_secret.then(|| "\"data\": …".to_owned())
}

/// `https://user:letmein@host/disk.img`
fn in_address(word: &str) -> Option<String> {
    let (_, rest) = word.split_once("://")?;
    let (user, _) = rest.split(['/', ',']).next()?.rsplit_once('@')?;
    let (user, secret) = user.split_once(':')?;
    (!secret.is_empty()).then(|| format!("://{user}:…@"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(words: &[&str]) -> Vec<String> {
        in_the_open(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn secrets_are_found_and_not_repeated() {
        let open = [
            "secret,id=s0,data=letmein",
            "qom-type=secret,id=s0,data=letmein",
            r#"{"qom-type":"secret","id":"s0","data":"letmein"}"#,
            "port=5900,password=letmein",
            "file=https://me:letmein@host/disk.img,format=raw",
        ];
        for word in open {
            let found = found(&["qemu-system-x86_64", "-object", word]);
            assert_eq!(found.len(), 1, "{word}");
            assert!(!found[0].contains("letmein"), "{found:?}");
        }
    }

    #[test]
    fn what_holds_no_secret_is_not_named() {
        let closed = [
            "secret,id=s0,file=/etc/key",
            r#"{"qom-type":"secret","id":"s0","file":"/etc/key"}"#,
            ":1,password=on",
            "port=5900,password-secret=s0",
            "file=https://host/disk.img",
            "file=/srv/a@b:c.img,data=1",
            "memory-backend-file,id=m,data=1",
        ];
        assert_eq!(found(&closed), [""; 0]);
    }
}
