//! What guest memory is made of.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What a guest's memory is made of. Its text form is what the command line, records, reports and messages to other nodes use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Backing {
    /// A file on tmpfs mounted `huge=advise`: 4 KiB faults into memory that ends up mapped by 2 MiB pages.
    #[default]
    Thp,
    /// A file on hugetlbfs with pages of 2 MiB.
    Hugetlb2M,
    /// A file on hugetlbfs with pages of 1 GiB.
    Hugetlb1G,
}

impl Backing {
    /// All of them, smallest pages first.
    pub const ALL: [Self; 3] = [Self::Thp, Self::Hugetlb2M, Self::Hugetlb1G];

    /// `thp`, `hugetlb-2m` or `hugetlb-1g`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Thp => "thp",
            Self::Hugetlb2M => "hugetlb-2m",
            Self::Hugetlb1G => "hugetlb-1g",
        }
    }

    /// Size of its smallest unit, by which it is tracked and faulted, in bytes.
    #[must_use]
    pub const fn page_bytes(self) -> u64 {
        match self {
            Self::Thp => 4 << 10,
            Self::Hugetlb2M => 2 << 20,
            Self::Hugetlb1G => 1 << 30,
        }
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The text is not the name of a [`Backing`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("Expected memory backing thp, hugetlb-2m or hugetlb-1g, found {0:?}")]
pub struct UnknownBacking(String);

impl FromStr for Backing {
    type Err = UnknownBacking;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|backing| backing.name() == text)
            .ok_or_else(|| UnknownBacking(text.to_owned()))
    }
}

// As text in every format: messages between nodes hold the word, not a number that would change its meaning with the order above.
impl Serialize for Backing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Backing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(feature = "schema")]
impl utoipa::PartialSchema for Backing {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        utoipa::openapi::ObjectBuilder::new()
            .schema_type(utoipa::openapi::schema::Type::String)
            .description(Some("What guest memory is made of."))
            .enum_values(Some(Self::ALL.map(Self::name)))
            .into()
    }
}

#[cfg(feature = "schema")]
impl utoipa::ToSchema for Backing {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for backing in Backing::ALL {
            assert_eq!(backing.name().parse::<Backing>().expect("its own name"), backing);
            let json = serde_json::to_string(&backing).unwrap();
            assert_eq!(json, format!("{:?}", backing.name()));
            assert_eq!(serde_json::from_str::<Backing>(&json).unwrap(), backing);
        }
        let unknown = "ksm".parse::<Backing>().unwrap_err().to_string();
        assert!(unknown.contains("thp") && unknown.contains("\"ksm\""), "{unknown}");
    }
}
