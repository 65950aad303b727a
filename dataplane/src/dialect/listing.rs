//! One page of an S3 listing (`ListObjectsV2`).
//!
//! Keys are asked for percent-encoded (`encoding-type=url`), because a key may hold characters that XML cannot; a server
//! that does not know the parameter says so by not repeating it, and its keys are taken as they are. What is not a listing
//! is none: half a list would pass for all of it.
#![forbid(unsafe_code)]

use percent_encoding::percent_decode_str;
use quick_xml::Reader;
use quick_xml::events::Event;

use super::changes::character;

/// What one answer lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Keys, decoded, in the order of the answer.
    pub keys: Vec<Box<[u8]>>,
    /// How to ask for what follows; `None` at the end.
    pub next: Option<String>,
}

/// Reads an answer. `None` if it is not a whole listing.
pub fn parse_listing(body: &[u8]) -> Option<Listing> {
    let text = std::str::from_utf8(body).ok()?;
    let mut reader = Reader::from_str(text.strip_prefix('\u{feff}').unwrap_or(text));
    let mut path: Vec<String> = Vec::new();
    let (mut keys, mut token, mut encoding, mut truncated) = (Vec::new(), None, None, None);
    let mut value = String::new();
    let mut is_over = false;
    loop {
        match reader.read_event().ok()? {
            Event::Start(tag) => {
                if is_over {
                    return None;
                }
                path.push(tag.local_name().as_ref().to_owned());
                value.clear();
            }
            Event::End(_) => {
                let place: Vec<&str> = path.iter().map(String::as_str).collect();
                match place[..] {
                    ["ListBucketResult", "Contents", "Key"] => keys.push(std::mem::take(&mut value)),
                    ["ListBucketResult", "NextContinuationToken"] => token = Some(std::mem::take(&mut value)),
                    ["ListBucketResult", "EncodingType"] => encoding = Some(std::mem::take(&mut value)),
                    ["ListBucketResult", "IsTruncated"] => truncated = Some(value.trim() == "true"),
                    ["ListBucketResult"] => is_over = true,
                    _ => {}
                }
                path.pop()?;
            }
            Event::Text(piece) => value.push_str(&piece),
            Event::CData(piece) => value.push_str(&piece),
            Event::GeneralRef(entity) => value.push(character(&entity)?),
            Event::Empty(_) | Event::Decl(_) | Event::Comment(_) => {}
            Event::Eof => break,
            // Above all a document type, which may rename everything.
            _ => return None,
        }
    }
    if !is_over || !path.is_empty() || (truncated == Some(true) && token.is_none()) {
        return None;
    }
    let is_encoded = encoding.is_some_and(|encoding| encoding.trim() == "url");
    let key = |key: String| -> Box<[u8]> {
        if is_encoded {
            // As a form is encoded: a blank may be a plus.
            percent_decode_str(&key.replace('+', "%20")).collect()
        } else {
            key.into_bytes().into()
        }
    };
    let keys = keys.into_iter().map(key).collect();
    Some(Listing { keys, next: token.filter(|_| truncated == Some(true)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(inner: &str) -> String {
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult \
             xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name>{inner}</ListBucketResult>"
        )
    }

    fn keys(inner: &str) -> Option<(Vec<String>, Option<String>)> {
        parse_listing(listing(inner).as_bytes()).map(|found| {
            let keys = found.keys.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
            (keys, found.next)
        })
    }

    #[test]
    fn keys_come_as_they_are_in_the_bucket() {
        let plain = "<IsTruncated>false</IsTruncated>\
            <Contents><Key>a b+c%20&amp;&#x41;</Key><Size>3</Size><Owner><ID>x</ID></Owner></Contents>\
            <Contents><Key>d</Key></Contents>";
        assert_eq!(keys(plain), Some((vec!["a b+c%20&A".into(), "d".into()], None)));
        let encoded = format!("<EncodingType>url</EncodingType>{}", plain.replace("&amp;&#x41;", "%2B%26A"));
        assert_eq!(keys(&encoded), Some((vec!["a b c +&A".into(), "d".into()], None)));
        assert_eq!(keys(""), Some((vec![], None)));
    }

    #[test]
    fn a_page_says_how_to_go_on() {
        let page = "<IsTruncated>true</IsTruncated><NextContinuationToken>t=/+</NextContinuationToken>";
        assert_eq!(keys(page), Some((vec![], Some("t=/+".into()))));
        // Cut off without a way on: not the whole list.
        assert_eq!(keys("<IsTruncated>true</IsTruncated>"), None);
        // The key of a folder is no object's.
        assert_eq!(keys("<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes>"), Some((vec![], None)));
    }

    #[test]
    fn what_is_not_a_listing_is_none() {
        for text in ["", "not xml", "<Error><Code>AccessDenied</Code></Error>", "<html></html>"] {
            assert_eq!(parse_listing(text.as_bytes()), None, "{text}");
        }
        let whole = listing("<Contents><Key>a</Key></Contents>");
        for length in 0..whole.len() {
            assert_eq!(parse_listing(&whole.as_bytes()[..length]), None, "{length}");
        }
        assert_eq!(parse_listing(format!("<!DOCTYPE x>{whole}").as_bytes()), None);
    }
}
