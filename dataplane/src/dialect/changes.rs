//! What a request about a bucket changes, as far as a cache must know it.
//!
//! The node carries out no such request; it forgets what the origin is about to change. Too much forgotten costs time,
//! too little serves old bytes. So whatever is not known for certain, an unknown parameter or a list that could be
//! read in two ways, may change any object.
#![forbid(unsafe_code)]

use quick_xml::Reader;
use quick_xml::events::Event;

use crate::http1::{Method, RequestHead};

/// Longest list of keys that is read, bytes; S3's own of 1,000 keys is shorter.
pub const BODY_BYTES_MAX: usize = 2 << 20;

/// Parameters that name a setting of a bucket. Writing or deleting one leaves every object as it is.
const SETTINGS: &[&str] = &[
    "accelerate",
    "acl",
    "analytics",
    "cors",
    "encryption",
    "intelligent-tiering",
    "inventory",
    "lifecycle",
    "logging",
    "metrics",
    "notification",
    "object-lock",
    "ownershipControls",
    "policy",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "tagging",
    "versioning",
    "website",
];

/// What a request about a bucket, not about one object, changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketChange {
    /// No object.
    Nothing,
    /// The objects that its body lists; [`keys_to_delete`].
    Listed,
    /// Any object.
    Anything,
}

/// What a request about a bucket changes.
pub fn bucket_change(head: &RequestHead) -> BucketChange {
    let mut names = Vec::new();
    for pair in head.query().unwrap_or_default().split(|byte| *byte == b'&') {
        match pair.split(|byte| *byte == b'=').next().unwrap_or_default() {
            // SDKs add the name of the operation, and the name of one configuration among several.
            b"" | b"x-id" | b"id" => {}
            name => names.push(name),
        }
    }
    let [name] = names[..] else {
        // To make a bucket changes nothing in it.
        let makes = head.method == Method::Put && names.is_empty();
        return if makes { BucketChange::Nothing } else { BucketChange::Anything };
    };
    match head.method {
        Method::Get | Method::Head | Method::Options => BucketChange::Nothing,
        Method::Put | Method::Delete if SETTINGS.iter().any(|setting| setting.as_bytes() == name) => {
            BucketChange::Nothing
        }
        Method::Post if name == b"delete" && !is_wrapped(head) => BucketChange::Listed,
        _ => BucketChange::Anything,
    }
}

/// Whether the body is something else than the bytes that it is about.
fn is_wrapped(head: &RequestHead) -> bool {
    head.header("content-encoding").is_some()
        || head.header("x-amz-content-sha256").is_some_and(|sum| sum.starts_with(b"STREAMING-"))
}

/// The keys in the body of a deletion of many objects, as they were before they became XML. `None` if there is
/// anything in it that S3 has not described, or no key.
pub fn keys_to_delete(body: &[u8]) -> Option<Vec<Box<[u8]>>> {
    let text = std::str::from_utf8(body).ok()?;
    let mut reader = Reader::from_str(text.strip_prefix('\u{feff}').unwrap_or(text));
    let (mut keys, mut key) = (Vec::new(), String::new());
    let (mut path, mut has_key, mut is_over) = (Vec::new(), false, false);
    loop {
        let event = reader.read_event().ok()?;
        let is_in_key = path.last() == Some(&Place::Key);
        match event {
            Event::Start(tag) => {
                if is_over {
                    return None;
                }
                let place = Place::below(path.last().copied(), tag.local_name().as_ref())?;
                match place {
                    Place::Object => has_key = false,
                    Place::Key if has_key => return None,
                    Place::Key => has_key = true,
                    Place::Delete | Place::Other => {}
                }
                path.push(place);
            }
            Event::End(_) => match path.pop()? {
                Place::Key if key.is_empty() => return None,
                Place::Key => keys.push(std::mem::take(&mut key).into_bytes().into()),
                Place::Object if !has_key => return None,
                Place::Delete => is_over = true,
                Place::Object | Place::Other => {}
            },
            // Of no interest, and empty; an empty key or object is none.
            Event::Empty(tag)
                if Place::below(path.last().copied(), tag.local_name().as_ref()) == Some(Place::Other) => {}
            // A carriage return becomes a line feed for some readers, and stays one for others.
            Event::Text(piece) if is_in_key && !piece.contains('\r') => key.push_str(&piece),
            Event::CData(piece) if is_in_key && !piece.contains('\r') => key.push_str(&piece),
            Event::GeneralRef(entity) if is_in_key => key.push(character(&entity)?),
            Event::Text(_) | Event::CData(_) | Event::GeneralRef(_) if path.last() == Some(&Place::Other) => {
            }
            Event::Text(piece) if !is_in_key && piece.trim_ascii().is_empty() => {}
            Event::Comment(_) if !is_in_key => {}
            Event::Decl(declaration) => match declaration.encoding() {
                None => {}
                Some(Ok(name)) if name.eq_ignore_ascii_case("utf-8") => {}
                Some(_) => return None,
            },
            Event::Eof => return (is_over && path.is_empty() && !keys.is_empty()).then_some(keys),
            // Above all a document type, which may rename everything.
            _ => return None,
        }
    }
}

pub(super) fn character(entity: &quick_xml::events::BytesRef<'_>) -> Option<char> {
    match &**entity {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => entity.resolve_char_ref().ok().flatten(),
    }
}

/// Where in the list the reader is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Delete,
    Object,
    Key,
    /// Of no interest, and known to be so.
    Other,
}

impl Place {
    fn below(parent: Option<Self>, name: &str) -> Option<Self> {
        match (parent, name) {
            (None, "Delete") => Some(Self::Delete),
            (Some(Self::Delete), "Object") => Some(Self::Object),
            (Some(Self::Object), "Key") => Some(Self::Key),
            (Some(Self::Delete), "Quiet")
            | (Some(Self::Object), "VersionId" | "ETag" | "LastModifiedTime" | "Size") => Some(Self::Other),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http1::{HeadLimits, HeadProgress, parse_head};
    use proptest::prelude::*;

    fn change(request_line: &str, headers: &str) -> BucketChange {
        let text = format!("{request_line} HTTP/1.1\r\nHost: h\r\n{headers}\r\n");
        match parse_head(text.as_bytes(), &HeadLimits::default()) {
            Ok(HeadProgress::Whole { head, .. }) => bucket_change(&head),
            other => panic!("{request_line}: {other:?}"),
        }
    }

    #[test]
    fn only_what_is_known_to_change_nothing_changes_nothing() {
        for line in [
            "PUT /b",
            "PUT /b?versioning",
            "PUT /b/?acl=",
            "DELETE /b?lifecycle",
            "PUT /b?x-id=PutBucketPolicy&policy",
            "PUT /b?analytics&id=7",
            "OPTIONS /b?cors",
        ] {
            assert_eq!(change(line, ""), BucketChange::Nothing, "{line}");
        }
        for line in [
            "DELETE /b",
            "POST /b",
            "POST /b?versioning",
            "PUT /b?rename",
            "PUT /b?Versioning",
            "PUT /b?versioning&rename",
            "PUT /b?%76ersioning",
            "POST /b?delete&encoding-type=url",
            "POST /b?delete&delete",
            "PUT /b?delete",
        ] {
            assert_eq!(change(line, ""), BucketChange::Anything, "{line}");
        }
    }

    #[test]
    fn a_list_in_another_coding_is_not_read() {
        for line in ["POST /b?delete", "POST /b/?delete=", "POST /b?delete&x-id=DeleteObjects"] {
            assert_eq!(change(line, ""), BucketChange::Listed, "{line}");
        }
        for header in [
            "Content-Encoding: gzip\r\n",
            "Content-Encoding: aws-chunked\r\n",
            "X-Amz-Content-Sha256: STREAMING-UNSIGNED-PAYLOAD-TRAILER\r\n",
        ] {
            assert_eq!(change("POST /b?delete", header), BucketChange::Anything, "{header}");
        }
    }

    #[test]
    fn keys_are_read_as_they_were_meant() {
        let table: &[(&str, &[&str])] = &[
            ("<Delete><Object><Key>a</Key></Object></Delete>", &["a"]),
            (
                "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\r\n<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\r\n \
                 <Quiet>true</Quiet><Object><Key>a/b c</Key><VersionId>1&amp;2</VersionId></Object>\
                 <!-- two --><Object>\n<VersionId/><Key> b\n</Key></Object></Delete>\n",
                &["a/b c", " b\n"],
            ),
            ("<Delete><Object><Key>a&amp;b&lt;&#x41;&#10;&apos;</Key></Object></Delete>", &["a&b<A\n'"]),
            (
                "<s:Delete><s:Object><s:Key><![CDATA[<a&amp;>]]>b</s:Key></s:Object></s:Delete>",
                &["<a&amp;>b"],
            ),
            ("<Delete><Object><Key>%41+caf\u{e9}</Key></Object></Delete>", &["%41+caf\u{e9}"]),
        ];
        for (body, keys) in table {
            let read = keys_to_delete(body.as_bytes());
            let read: Option<Vec<_>> =
                read.as_ref().map(|read| read.iter().map(|key| std::str::from_utf8(key).unwrap()).collect());
            assert_eq!(read.as_deref(), Some(*keys), "{body}");
        }
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_not_read() {
        for body in [
            "",
            "{\"Objects\":[{\"Key\":\"a\"}]}",
            "<Delete></Delete>",
            "<Delete><Object><Key>a</Key></Object>",
            "<Delete><Object><Key>a</Object></Delete>",
            "<Delete><Object><Key></Key></Object></Delete>",
            "<Delete><Object><Key/></Object></Delete>",
            "<Delete><Object><VersionId>1</VersionId></Object></Delete>",
            "<Delete><Object><Key>a</Key><Key>b</Key></Object></Delete>",
            "<Delete><Prefix>a</Prefix><Object><Key>a</Key></Object></Delete>",
            "<Delete><Object><Key>a<b>c</b></Key></Object></Delete>",
            "<Delete><Object><Key>a&other;</Key></Object></Delete>",
            "<Delete><Object><Key>a\rb</Key></Object></Delete>",
            "<Delete><Object><Key>a</Key></Object></Delete><Delete><Object><Key>b</Key></Object></Delete>",
            "2f\r\n<Delete><Object><Key>a</Key></Object></Delete>",
            "<!DOCTYPE Delete [<!ENTITY a \"b\">]><Delete><Object><Key>a</Key></Object></Delete>",
            "<?xml version=\"1.0\" encoding=\"latin1\"?><Delete><Object><Key>a</Key></Object></Delete>",
            "<DeleteRequest><Object><Key>a</Key></Object></DeleteRequest>",
        ] {
            assert_eq!(keys_to_delete(body.as_bytes()), None, "{body}");
        }
        assert_eq!(keys_to_delete(b"<Delete><Object><Key>\xff</Key></Object></Delete>"), None);
    }

    proptest! {
        #[test]
        fn no_body_panics(body: Vec<u8>) {
            let _ = keys_to_delete(&body);
        }

        #[test]
        fn every_key_survives_its_escaping(key in "[ -~\u{a0}-\u{ffff}\n]{1,40}") {
            let escaped = key.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            let body = format!("<Delete><Object><Key>{escaped}</Key></Object></Delete>");
            prop_assert_eq!(keys_to_delete(body.as_bytes()), Some(vec![key.into_bytes().into()]));
        }
    }
}
