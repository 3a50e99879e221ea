"""The lexicon: English, French and Hindi side by side, one word to a row."""

from __future__ import annotations

from unicodedata import normalize

from keepleft.demo.phrases.grammar_types import Adjective, Noun, PlacePhrase, Triple, Verb


def parse_table(table: str) -> list[list[str]]:
    """The cells of a table: a row on each line, cells separated by |."""
    return [
        [cell.strip() for cell in line.split("|")] for line in normalize("NFC", table).strip().splitlines()
    ]


def nouns(table: str) -> dict[str, Noun]:
    """Rows: english [plural] | french gender [plural] | hindi gender [honoured] [| classes of adjectives]."""
    out = {}
    for english, french, hindi, *fits in parse_table(table):
        one, *many = english.split()
        un, gender, *des = french.split()
        ek, ling, *honoured = hindi.split()
        out[one] = Noun(
            one,
            many[0] if many else one + "s",
            un,
            des[0] if des else un + "s",
            gender == "f",
            ek,
            ling == "f",
            bool(honoured),
            fits[0] if fits else "",
        )
    return out


def adjectives(table: str) -> dict[str, Adjective]:
    """Rows: english | french masculine [feminine [plural plural]] | hindi [| classes [| before, liaison]]."""
    out = {}
    for english, french, hindi, *rest in parse_table(table):
        forms = french.split()
        masculine = forms[0]
        feminine = forms[1] if len(forms) > 1 else masculine if masculine.endswith("e") else masculine + "e"
        masculines = forms[2] if len(forms) > 2 else masculine if masculine[-1] in "sx" else masculine + "s"
        feminines = forms[3] if len(forms) > 3 else feminine + "s"
        place = rest[1].split() if len(rest) > 1 else []
        out[english] = Adjective(
            english,
            (masculine, feminine, masculines, feminines),
            hindi,
            bool(place),
            place[1] if len(place) > 1 else "",
            rest[0] if rest else "",
        )
    return out


def verbs(table: str) -> dict[str, Verb]:
    """Rows: english [/particle] | infinitive [participle present…] [+future] [être] | hindi [ने] [(case)]

    English may leave out the two regular forms in the middle: understand understood. A French verb in -er
    whose forms are not given is regular. In Hindi the last word is the stem; ने says that the past is
    ergative, नेf that the noun before the stem is feminine too.
    """
    out = {}
    for english, french, hindi in parse_table(table):
        forms_text, _, particle = english.partition(" /")
        base, *between, past = forms_text.split()
        third, going = between or (base + "s", base + "ing")
        base, third, going, past = (f"{form} {particle}".strip() for form in (base, third, going, past))
        words = french.split()
        reflexive = words[0] == "se"
        words = words[1:] if reflexive else words
        being = "être" in words
        future = next((word[1:] for word in words if word.startswith("+")), "")
        infinitive, *forms = [word for word in words if word != "être" and not word.startswith("+")]
        stem = infinitive[:-2]
        soft_stem = stem + "e" if stem.endswith("g") else stem
        regular = (stem + "é", stem + "e", stem + "es", stem + "e", soft_stem + "ons", stem + "ent")
        participle, i, you, he, we, they = forms or regular
        *prefix, last = [word for word in hindi.split() if not word.startswith(("ने", "("))]
        case = next((word.strip("()") for word in hindi.split() if word.startswith("(")), "")
        out[base] = Verb(
            (base, third, going, past),
            infinitive,
            (i, you, he, we, they),
            participle,
            future or infinitive.removesuffix("e"),
            last,
            being or reflexive,
            reflexive,
            " ".join(prefix),
            "नेf" in hindi,
            "ने" in hindi,
            case,
        )
    return out


def places(table: str) -> dict[str, PlacePhrase]:
    """Rows: key | english | preposition | french | at [, to] | hindi | postposition

    The two French prepositions are for being there and for going there; without the second nobody goes there.
    """
    out = {}
    for key, english, at, french, ways, hindi, post in parse_table(table):
        à, *to = ways.split(",")
        out[key] = PlacePhrase(
            (f"{at} {english}", f"{à} {french}", f"{hindi} {post}"),
            (f"to {english}", f"{to[0].strip()} {french}", hindi) if to else ("", "", ""),
            (f"from {english}", f"de {french}", f"{hindi} से"),
        )
    out["home"] = PlacePhrase(
        ("at home", "à la maison", "घर पर"),
        ("home", "à la maison", "घर"),
        ("from home", "de la maison", "घर से"),
    )
    return out


def triples(table: str) -> dict[str, Triple]:
    """Rows: english | french | hindi; keyed by the English."""
    return {english: (english, french, hindi) for english, french, hindi in parse_table(table)}


PEOPLE = nouns("""
    father            | père m              | पिता m honoured
    mother            | mère f              | माँ f honoured
    brother           | frère m             | भाई m
    sister            | sœur f              | बहन f
    friend            | ami m               | दोस्त m
    son               | fils m fils         | बेटा m
    daughter          | fille f             | बेटी f
    boy               | garçon m            | लड़का m
    girl              | fille f             | लड़की f
    child children    | enfant m            | बच्चा m
    man men           | homme m             | आदमी m
    woman women       | femme f             | औरत f
""")

ANIMALS = nouns("""
    cat               | chat m              | बिल्ली f   | kbz
    dog               | chien m             | कुत्ता m   | kbz
    bird              | oiseau m oiseaux    | चिड़िया f  | kbz
    horse             | cheval m chevaux    | घोड़ा m    | kbz
""")

# classes: c colour, z size, x price, w weight, h clean or dirty, b beautiful, k animal colours, n new or old
THINGS = nouns("""
    book              | livre m             | किताब f    | zxwn
    bag               | sac m               | बैग m      | czxwhn
    pen               | stylo m             | कलम f      | cxn
    key               | clé f               | चाबी f     | zn
    watch watches     | montre f            | घड़ी f     | zxbn
    phone             | téléphone m         | फ़ोन m     | czxn
    computer          | ordinateur m        | कंप्यूटर m | zxwn
    umbrella          | parapluie m         | छाता m     | czxn
    hat               | chapeau m chapeaux  | टोपी f     | czxbhn
    shirt             | chemise f           | कमीज़ f    | cxbhn
    ticket            | billet m            | टिकट m     | x
    letter            | lettre f            | चिट्ठी f   |
    flower            | fleur f             | फूल m      | czb
    car               | voiture f           | कार f      | czxbhn
    bicycle           | vélo m              | साइकिल f   | czxn
    house             | maison f            | घर m       | czxbhn
    table             | table f             | मेज़ f     | czxwhn
    chair             | chaise f            | कुर्सी f   | czxwhn
    box boxes         | boîte f             | डिब्बा m   | czwn
    room              | chambre f           | कमरा m     | zhb
    garden            | jardin m            | बगीचा m    | zb
    door              | porte f             | दरवाज़ा m  | czhn
    window            | fenêtre f           | खिड़की f   | zhn
    bed               | lit m               | पलंग m     | zxn
    tree              | arbre m             | पेड़ m     | zb
    glass glasses     | verre m             | गिलास m    | zh
""")

COUNTED = nouns("""
    apple             | pomme f             | सेब m
    banana            | banane f            | केला m
    orange            | orange f            | संतरा m
    mango mangoes     | mangue f            | आम m
    egg               | œuf m               | अंडा m
""")

FOODS = nouns("""
    bread             | pain m              | रोटी f
    rice              | riz m               | चावल m
    fish              | poisson m           | मछली f
    meat              | viande f            | मांस m
    cheese            | fromage m           | पनीर m
    salad             | salade f            | सलाद m
""")

DRINKS = nouns("""
    water             | eau f               | पानी m
    milk              | lait m              | दूध m
    tea               | thé m               | चाय f
    coffee            | café m              | कॉफ़ी f
    juice             | jus m               | जूस m
""")

PLEASURES = nouns("""
    music             | musique f           | संगीत m
    football          | football m          | फ़ुटबॉल m
    cricket           | cricket m           | क्रिकेट m
    poetry            | poésie f            | कविता f
    rain              | pluie f             | बारिश f
    cinema            | cinéma m            | सिनेमा m
    tennis            | tennis m            | टेनिस m
""")

STATES = adjectives("""
    happy             | heureux heureuse    | खुश        | v
    sad               | triste              | उदास       | v
    tired             | fatigué             | थका हुआ    | v
    sick              | malade              | बीमार      | v
    busy              | occupé              | व्यस्त     | v
    angry             | fâché               | नाराज़     | v
    calm              | calme               | शांत       | v
    worried           | inquiet inquiète    | परेशान     | v
    surprised         | surpris             | हैरान      | v
    ready             | prêt                | तैयार      |
    alone             | seul                | अकेला      |
""")

# classes: a adults alone, o those who may be old
TRAITS = adjectives("""
    kind              | gentil gentille     | दयालु      |
    tall              | grand               | लंबा       |
    strong            | fort                | ताकतवर     |
    intelligent       | intelligent         | बुद्धिमान  |
    brave             | courageux courageuse | बहादुर    |
    honest            | honnête             | ईमानदार    |
    shy               | timide              | शर्मीला    |
    rich              | riche               | अमीर       | a
    poor              | pauvre              | गरीब       | a
    famous            | célèbre             | मशहूर      | a
    young             | jeune               | जवान       | a
    old               | vieux vieille       | बूढ़ा      | o
""")

QUALITIES = adjectives("""
    red               | rouge               | लाल        | c
    blue              | bleu                | नीला       | c
    green             | vert                | हरा        | c
    yellow            | jaune               | पीला       | c
    white             | blanc blanche       | सफ़ेद      | ck
    black             | noir                | काला       | ck
    big               | grand               | बड़ा       | z  | before
    small             | petit               | छोटा       | z  | before
    beautiful         | beau belle beaux belles | सुंदर  | b  | before bel
    old               | vieux vieille       | पुराना     | n  | before vieil
    expensive         | cher chère          | महँगा      | x
    heavy             | lourd               | भारी       | w
    clean             | propre              | साफ़       | h
    dirty             | sale                | गंदा       | h
""")

NEW = adjectives("new | nouveau nouvelle nouveaux nouvelles | नया | n | before nouvel")["new"]

JOBS = [
    (tuple(english.split(",")), tuple(french.split()), tuple(hindi.split()))
    for english, french, hindi in parse_table("""
    a doctor,doctors         | médecin médecin médecins médecins                   | डॉक्टर डॉक्टर डॉक्टर
    a teacher,teachers       | professeur professeure professeurs professeures | अध्यापक अध्यापिका अध्यापिकाएँ
    a student,students       | étudiant étudiante étudiants étudiantes             | छात्र छात्रा छात्राएँ
    an engineer,engineers    | ingénieur ingénieure ingénieurs ingénieures | इंजीनियर इंजीनियर इंजीनियर
    a farmer,farmers         | agriculteur agricultrice agriculteurs agricultrices | किसान किसान किसान
    a singer,singers         | chanteur chanteuse chanteurs chanteuses             | गायक गायिका गायिकाएँ
    a writer,writers         | écrivain écrivaine écrivains écrivaines             | लेखक लेखिका लेखिकाएँ
    a lawyer,lawyers         | avocat avocate avocats avocates                     | वकील वकील वकील
    an artist,artists        | artiste artiste artistes artistes                   | कलाकार कलाकार कलाकार
    a journalist,journalists | journaliste journaliste journalistes journalistes   | पत्रकार पत्रकार पत्रकार
""")
]

ACTIONS = verbs("""
    sleep sleeps sleeping slept | dormir dormi dors dors dort dormons dorment | सो
    work works working worked | travailler | काम कर ने
    study studies studying studied | étudier | पढ़ाई कर नेf
    play plays playing played | jouer | खेल
    dance dances dancing danced | danser | नाच
    sing sings singing sang | chanter | गाना गा ने
    wait waits waiting waited | attendre attendu attends attends attend attendons attendent | इंतज़ार कर ने
    walk walks walking walked | se promener promené promène promènes promène promenons promènent +promèner | टहल
    run runs running ran | courir couru cours cours court courons courent +courr | दौड़
    cry cries crying cried | pleurer | रो
    get gets getting got /up | se lever levé lève lèves lève levons lèvent +lèver | उठ
""")  # noqa: E501

MOTIONS = verbs("""
    go goes going went | aller allé vais vas va allons vont +ir être | जा
    come comes coming came /back | revenir revenu reviens reviens revient revenons reviennent +reviendr être | वापस आ
    leave leaves leaving left | partir parti pars pars part partons partent être | निकल
    arrive arrives arriving arrived | arriver être | पहुँच
    live lives living lived | habiter | रह
    open opens opening opened | ouvrir ouvert ouvre ouvres ouvre ouvrons ouvrent | खुल
    close closes closing closed | fermer | बंद हो
""")  # noqa: E501

DEEDS = verbs("""
    eat eats eating ate | manger | खा ने
    drink drinks drinking drank | boire bu bois bois boit buvons boivent | पी ने
    buy buys buying bought | acheter acheté achète achètes achète achetons achètent +achèter | खरीद ने
    make makes making made | préparer | बना ने
    sell sells selling sold | vendre vendu vends vends vend vendons vendent | बेच ने
    look looks looking looked /for | chercher | ढूँढ़ ने
    read reads reading read | lire lu lis lis lit lisons lisent | पढ़ ने
    write writes writing wrote | écrire écrit écris écris écrit écrivons écrivent | लिख ने
    watch watches watching watched | regarder | देख ने
    listen listens listening listened /to | écouter | सुन ने
    play plays playing played | jouer | खेल ने
    give gives giving gave | donner | दे ने
    speak speaks speaking spoke | parler | बोल
    learn learns learning learned | apprendre appris apprends apprends apprend apprenons apprennent | सीख ने
    understand understood | comprendre compris comprends comprends comprend comprenons comprennent | समझ ने
    become becomes becoming became | devenir devenu deviens deviens devient devenons deviennent +deviendr être | बन
""")  # noqa: E501

# verbs with a person as object, which takes a postposition of its own in Hindi
BONDS = verbs("""
    love loves loving loved | aimer | प्यार कर ने (से)
    know knows knowing knew | connaître connu connais connais connaît connaissons connaissent | जान ने (को)
    understand understood | comprendre compris comprends comprends comprend comprenons comprennent | समझ ने (को)
    help helps helping helped | aider | मदद कर नेf (की)
    wait waits waiting waited /for | attendre attendu attends attends attend attendons attendent | इंतज़ार कर ने (का)
""")  # noqa: E501

PLACES = places("""
    school     | school         | at | la école          | à, à       | स्कूल        | में
    market     | the market     | at | le marché         | à, à       | बाज़ार       | में
    office     | the office     | at | le bureau         | à, à       | दफ़्तर       | में
    hospital   | the hospital   | at | le hôpital        | à, à       | अस्पताल      | में
    library    | the library    | at | la bibliothèque   | à, à       | पुस्तकालय    | में
    station    | the station    | at | la gare           | à, à       | स्टेशन       | पर
    airport    | the airport    | at | le aéroport       | à, à       | हवाई अड्डे   | पर
    restaurant | the restaurant | at | le restaurant     | à, à       | रेस्तराँ     | में
    hotel      | the hotel      | at | le hôtel          | à, à       | होटल         | में
    bank       | the bank       | at | la banque         | à, à       | बैंक         | में
    park       | the park       | in | le parc           | dans, à    | पार्क        | में
    village    | the village    | in | le village        | dans, à    | गाँव         | में
    beach      | the beach      | on | la plage          | sur, à     | समुद्र तट    | पर
    garden     | the garden     | in | le jardin         | dans       | बगीचे        | में
    kitchen    | the kitchen    | in | la cuisine        | dans       | रसोई         | में
    roof       | the roof       | on | le toit           | sur        | छत           | पर
    street     | the street     | in | la rue            | dans       | सड़क         | पर
    Paris      | Paris          | in | Paris             | à, à       | पेरिस        | में
    Delhi      | Delhi          | in | Delhi             | à, à       | दिल्ली       | में
    London     | London         | in | Londres           | à, à       | लंदन         | में
    Mumbai     | Mumbai         | in | Mumbai            | à, à       | मुंबई        | में
    France     | France         | in | France            | en, en     | फ़्रांस      | में
    India      | India          | in | Inde              | en, en     | भारत         | में
    Japan      | Japan          | in | le Japon          | à, à       | जापान        | में
    Canada     | Canada         | in | le Canada         | à, à       | कनाडा        | में
""")

DAYS = parse_table("""
    Monday    | lundi    | सोमवार
    Tuesday   | mardi    | मंगलवार
    Wednesday | mercredi | बुधवार
    Thursday  | jeudi    | गुरुवार
    Friday    | vendredi | शुक्रवार
    Saturday  | samedi   | शनिवार
    Sunday    | dimanche | रविवार
""")

TIMES = triples("""
    now            | maintenant            | अभी
    today          | aujourd'hui           | आज
    every day      | tous les jours        | रोज़
    every morning  | tous les matins       | हर सुबह
    every evening  | tous les soirs        | हर शाम
    yesterday      | hier                  | कल
    this morning   | ce matin              | आज सुबह
    last week      | la semaine dernière   | पिछले हफ़्ते
    tomorrow       | demain                | कल
    this evening   | ce soir               | आज शाम
    next week      | la semaine prochaine  | अगले हफ़्ते
""")

NUMBERS = parse_table("""
    one | un | एक
    two | deux | दो
    three | trois | तीन
    four | quatre | चार
    five | cinq | पाँच
    six | six | छह
    seven | sept | सात
    eight | huit | आठ
    nine | neuf | नौ
    ten | dix | दस
    eleven | onze | ग्यारह
    twelve | douze | बारह
    thirteen | treize | तेरह
    fourteen | quatorze | चौदह
    fifteen | quinze | पंद्रह
    sixteen | seize | सोलह
    seventeen | dix-sept | सत्रह
    eighteen | dix-huit | अठारह
    nineteen | dix-neuf | उन्नीस
    twenty | vingt | बीस
    thirty | trente | तीस
    forty | quarante | चालीस
    fifty | cinquante | पचास
    sixty | soixante | साठ
""")

LANGUAGES = parse_table("""
    French   | français | le français | फ़्रेंच
    Hindi    | hindi    | le hindi    | हिंदी
    English  | anglais  | le anglais  | अंग्रेज़ी
    Spanish  | espagnol | le espagnol | स्पेनिश
    German   | allemand | le allemand | जर्मन
    Japanese | japonais | le japonais | जापानी
""")

NAMES = parse_table("""
    Paul   | Paul   | पॉल
    Thomas | Thomas | थॉमस
    Ravi   | Ravi   | रवि
    Maria  | Maria  | मारिया
    Sarah  | Sarah  | सारा
    Meera  | Meera  | मीरा
""")
WOMEN = ("Maria", "Sarah", "Meera")
