"""The questions of `studies.wordings`: in which country one of three people lives.

A question is "Zoe lives in Lisbon. Ben lives in Tunis. Ada lives in Bangkok. In which country does Ben live?"
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

CAPITALS = """\
Kabul: Afghanistan, Tirana: Albania, Algiers: Algeria, Luanda: Angola, Buenos Aires: Argentina, \
Yerevan: Armenia, Canberra: Australia, Vienna: Austria, Baku: Azerbaijan, Nassau: Bahamas, \
Manama: Bahrain, Dhaka: Bangladesh, Bridgetown: Barbados, Minsk: Belarus, Brussels: Belgium, \
Belmopan: Belize, Thimphu: Bhutan, Sarajevo: Bosnia, Gaborone: Botswana, Brasilia: Brazil, \
Sofia: Bulgaria, Ouagadougou: Burkina Faso, Gitega: Burundi, Phnom Penh: Cambodia, Ottawa: Canada, \
Beijing: China, Santiago: Chile, Bogota: Colombia, Zagreb: Croatia, Havana: Cuba, Nicosia: Cyprus, \
Copenhagen: Denmark, Quito: Ecuador, Cairo: Egypt, Asmara: Eritrea, Tallinn: Estonia, \
Addis Ababa: Ethiopia, Suva: Fiji, Helsinki: Finland, Paris: France, Libreville: Gabon, Tbilisi: Georgia, \
Berlin: Germany, Accra: Ghana, Athens: Greece, Conakry: Guinea, Georgetown: Guyana, \
Tegucigalpa: Honduras, Budapest: Hungary, Reykjavik: Iceland, New Delhi: India, Jakarta: Indonesia, \
Tehran: Iran, Baghdad: Iraq, Dublin: Ireland, Jerusalem: Israel, Rome: Italy, Kingston: Jamaica, \
Tokyo: Japan, Amman: Jordan, Astana: Kazakhstan, Nairobi: Kenya, Bishkek: Kyrgyzstan, Vientiane: Laos, \
Riga: Latvia, Beirut: Lebanon, Maseru: Lesotho, Monrovia: Liberia, Tripoli: Libya, Vilnius: Lithuania, \
Antananarivo: Madagascar, Lilongwe: Malawi, Kuala Lumpur: Malaysia, Male: Maldives, Bamako: Mali, \
Valletta: Malta, Nouakchott: Mauritania, Port Louis: Mauritius, Chisinau: Moldova, Ulaanbaatar: Mongolia, \
Podgorica: Montenegro, Rabat: Morocco, Maputo: Mozambique, Windhoek: Namibia, Kathmandu: Nepal, \
Amsterdam: Netherlands, Wellington: New Zealand, Managua: Nicaragua, Abuja: Nigeria, \
Pyongyang: North Korea, Oslo: Norway, Muscat: Oman, Islamabad: Pakistan, Port Moresby: Papua New Guinea, \
Asuncion: Paraguay, Lima: Peru, Manila: Philippines, Warsaw: Poland, Lisbon: Portugal, Doha: Qatar, \
Bucharest: Romania, Moscow: Russia, Kigali: Rwanda, Riyadh: Saudi Arabia, Dakar: Senegal, \
Belgrade: Serbia, Freetown: Sierra Leone, Bratislava: Slovakia, Ljubljana: Slovenia, Mogadishu: Somalia, \
Pretoria: South Africa, Seoul: South Korea, Madrid: Spain, Khartoum: Sudan, Paramaribo: Suriname, \
Stockholm: Sweden, Bern: Switzerland, Damascus: Syria, Taipei: Taiwan, Dushanbe: Tajikistan, \
Dodoma: Tanzania, Bangkok: Thailand, Lome: Togo, Tunis: Tunisia, Ankara: Turkey, Kampala: Uganda, \
Kyiv: Ukraine, Montevideo: Uruguay, Tashkent: Uzbekistan, Caracas: Venezuela, Hanoi: Vietnam, \
Sanaa: Yemen, Lusaka: Zambia, Harare: Zimbabwe"""
CITIES = dict(pair.split(": ") for pair in CAPITALS.split(", "))  # capital → country
COUNTRY = re.compile(rf"\b({'|'.join(sorted(CITIES.values(), key=len, reverse=True))})\b")
NAMES = "Zoe Ben Ada Tom Mia Sam Eva Max Lily Jack Nora Paul".split()


@dataclass(frozen=True)
class Case:
    """A question, and the person and the city that it is about."""

    text: str
    name: str
    city: str

    @property
    def row(self) -> dict[str, object]:
        return {"question": self.text, "answers": [CITIES[self.city]]}


def case_of(names: Sequence[str], homes: Sequence[str], rng: random.Random) -> Case:
    """A question about the first of three people. `homes` are the cities in which they live."""
    facts = [f"{name} lives in {home}." for name, home in zip(names, homes, strict=True)]
    shuffled = rng.sample(facts, len(facts))
    text = " ".join([*shuffled, f"In which country does {names[0]} live?"])
    return Case(text, names[0], homes[0])


def cities_in(text: str) -> set[str]:
    """The cities that a text names."""
    return {city for city in CITIES if re.search(rf"\b{city}\b", text)}
