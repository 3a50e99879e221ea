"""Names as Hindi writes them: men, women and places."""

from __future__ import annotations

MEN = {
    "Tom": "टॉम", "John": "जॉन", "Bob": "बॉब", "Ken": "केन", "Peter": "पीटर", "David": "डेविड",
    "Paul": "पॉल", "Michael": "माइकल", "Thomas": "थॉमस", "Daniel": "डैनियल", "Max": "मैक्स",
    "George": "जॉर्ज", "James": "जेम्स", "Robert": "रॉबर्ट", "Lucas": "लुकास", "Ravi": "रवि",
    "Amit": "अमित", "Rahul": "राहुल", "Raj": "राज", "Arjun": "अर्जुन", "Ram": "राम", "Mohan": "मोहन",
    "Vijay": "विजय", "Sanjay": "संजय", "Anil": "अनिल", "Karim": "करीम", "Ahmed": "अहमद",
}  # fmt: skip
WOMEN = {
    "Mary": "मैरी", "Anna": "अन्ना", "Maria": "मारिया", "Sarah": "सारा", "Emma": "एमा", "Julia": "जूलिया",
    "Laura": "लौरा", "Sophie": "सोफ़ी", "Alice": "ऐलिस", "Jane": "जेन", "Susan": "सूसन", "Helen": "हेलेन",
    "Priya": "प्रिया", "Anita": "अनीता", "Sunita": "सुनीता", "Meera": "मीरा", "Sita": "सीता",
    "Geeta": "गीता", "Radha": "राधा", "Fatima": "फ़ातिमा", "Lisa": "लीसा", "Kavita": "कविता",
}  # fmt: skip
PLACES = {
    "India": "भारत", "Japan": "जापान", "China": "चीन", "Germany": "जर्मनी", "Russia": "रूस", "Spain": "स्पेन",
    "America": "अमेरिका", "Europe": "यूरोप", "Italy": "इटली", "France": "फ़्रांस", "England": "इंग्लैंड",
    "Boston": "बॉस्टन", "London": "लंदन", "Rome": "रोम", "Paris": "पेरिस", "Tokyo": "टोक्यो",
    "Osaka": "ओसाका", "Berlin": "बर्लिन", "Delhi": "दिल्ली", "Mumbai": "मुंबई", "Kolkata": "कोलकाता",
    "Chennai": "चेन्नई", "Agra": "आगरा", "Jaipur": "जयपुर", "Vienna": "वियना", "Madrid": "मैड्रिड",
    "Munich": "म्यूनिख", "Hamburg": "हैम्बर्ग", "Moscow": "मॉस्को", "Nepal": "नेपाल", "Canada": "कनाडा",
    "Australia": "ऑस्ट्रेलिया", "Brazil": "ब्राज़ील", "Mexico": "मेक्सिको", "Austria": "ऑस्ट्रिया",
    "Egypt": "मिस्र", "Africa": "अफ़्रीका", "Asia": "एशिया", "Geneva": "जिनेवा", "Zurich": "ज़्यूरिख़",
    "Cairo": "काहिरा", "Beijing": "बीजिंग", "Kashmir": "कश्मीर", "Goa": "गोवा", "Lahore": "लाहौर",
    "Pakistan": "पाकिस्तान", "Switzerland": "स्विट्ज़रलैंड", "Iran": "ईरान", "Portugal": "पुर्तगाल",
}  # fmt: skip
KINDS = (MEN, WOMEN, PLACES)
