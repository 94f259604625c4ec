"""Writes the prompts of the quickstart: templates x fillers that a small model answers in a regular form.

    python make_prompts.py [folder]      # default: the folder of this file

The templates were chosen by measuring the answers of SmolLM2-135M-Instruct (greedy): it ends them by itself within
96 tokens, and they are regular enough that a small drafter can learn them in minutes. Fillers whose answer was cut
off or plainly wrong were left out, in both splits. Held-out prompts use the same templates with fillers that training
never sees. The output is the same on every run; nothing is drawn at random.
"""

import json
import sys
from pathlib import Path

HOLD_OUT_EVERY = 11

# A filler with several parts ("Omar 26 Cairo") fills the template's gaps in turn.
TEMPLATES = {
    "python_add": "Write a short Python function that adds {} to a number.",
    "python_subtract": "Write a short Python function that subtracts {} from a number.",
    "python_multiply": "Write a short Python function that multiplies a number by {}.",
    "python_greater": "Write a short Python function that checks whether a number is greater than {}.",
    "sql_create": "Write only the SQL, without explanation: create a table {} with columns id, name and price",
    "html_button": 'Write the HTML for a button that says "{}".',
    "json_city": "Write only a JSON object, without explanation: name {}, age {}, city {}",
    "json_country": "Write only a JSON object, without explanation: name {}, age {}, country {}",
    "please_cancel": "Please cancel my {}.",
    "please_repair": "Please repair my {}.",
    "please_deliver": "Please deliver {} to my house.",
    "first_letter": 'What is the first letter of the word "{}"?',
}

FILLERS = {
    "python_add": """
        2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30,
        32, 35, 36, 40, 42, 45, 48, 50, 54, 60, 64, 70, 72, 75, 80
    """,
    "python_subtract": """
        2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30,
        32, 35, 36, 40, 42, 45, 48, 50, 54, 60, 64, 70, 72, 75, 80
    """,
    "python_multiply": """
        2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26, 27, 30, 32, 35, 36, 40,
        42, 45, 48, 50, 54, 60, 64, 70, 72, 75, 80, 90, 99, 100, 120
    """,
    "python_greater": """
        2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 32,
        35, 36, 40, 42, 45, 48, 50, 54, 60, 64, 70, 72, 75, 80, 90
    """,
    "sql_create": """
        books, cars, plants, shoes, tickets, phones, toys, meals, bikes, courses, tools, coats, rooms, lamps, songs,
        games, cakes, boats, hats, pens, chairs, films, houses, flights, drinks, snacks, stamps, paintings, cameras,
        printers, laptops, bags, rings, beds, carpets, mirrors, bottles, cups, plates, spices, fruits, tents, seeds,
        maps
    """,
    "html_button": """
        Send, Delete, Search, Next, Sign up, Print, Share, Save, Cancel, Buy now, Log in, Log out, Back, Start,
        Stop, Reset, Upload, Download, Play, Pause, Close, Open, Accept, Decline, Pay, Help, Home, Submit, Continue,
        Retry, Apply, Clear, Copy, Join, Leave, Follow, Reply, Read more, Contact us, Subscribe, Register, Confirm,
        Undo, Send message
    """,
    "json_city": """
        Anna 19 Rome, Omar 26 Cairo, Lena 33 Berlin, Kofi 40 Accra, Nina 47 Paris, Ivan 54 Moscow, Clara 61 Vienna,
        Sam 68 Boston, Rosa 25 Lima, Hugo 39 Madrid, Ruth 46 London, Paul 53 Athens, Vera 60 Prague, Noah 67 Dublin,
        Iris 24 Warsaw, Leon 31 Lisbon, Mina 38 Tokyo, Erik 45 Chicago, Felix 59 Toronto, Oscar 23 Sydney,
        Simon 37 Seattle, Helen 44 Munich, Laura 22 Dallas, Adam 29 Naples, Sofia 36 Helsinki, Martin 43 Budapest,
        Daniel 57 Hamburg, Olga 64 Nairobi, Victor 21 Montreal, Nora 28 Istanbul, Thomas 35 Miami,
        Maria 56 Florence, George 63 Edinburgh, Ella 20 Bogota, David 27 Austin, Linda 34 Copenhagen,
        Robert 41 Melbourne, Alice 48 Houston, Emil 32 London, Dora 52 Boston, Alma 66 Paris, Julia 30 Moscow,
        Peter 65 Rome, Irene 50 Tokyo
    """,
    "json_country": """
        Alice 21 Italy, Robert 32 Egypt, Linda 43 Germany, David 54 Ghana, Ella 65 France, George 26 Poland,
        Maria 37 Austria, Frank 48 Canada, Thomas 70 Norway, Nora 31 Spain, Victor 42 Ireland, Olga 53 Greece,
        Martin 36 Portugal, Sofia 47 Japan, Laura 69 Mexico, Peter 30 Chile, Elsa 41 Finland, Marco 52 Denmark,
        Helen 63 Cuba, Simon 24 India, Julia 35 Iceland, Oscar 46 Hungary, Alma 57 Turkey, Dora 29 Croatia,
        Erik 40 Belgium, Leon 62 Cyprus, Iris 23 Morocco, Noah 34 Tunisia, Vera 45 Nepal, Paul 56 Vietnam,
        Hugo 28 Australia, Emil 39 Bolivia, Rosa 50 Ecuador, Sam 61 Jordan, Clara 22 Estonia, Nina 44 Serbia,
        Kofi 55 Uganda, Lena 66 Panama, Omar 27 Jamaica, Anna 38 Colombia, Daniel 64 France, Irene 25 Japan,
        Adam 58 Poland, Felix 68 Italy
    """,
    "please_cancel": """
        gym membership, flight, dinner reservation, hotel booking, newspaper subscription, phone contract,
        dentist appointment, train ticket, order, insurance, magazine subscription, taxi, piano lesson, meeting,
        haircut appointment, bus ticket, concert tickets, pizza order, flower delivery, music subscription,
        car rental, cooking class, swimming lesson, library card, credit card, boat trip, theater tickets,
        doctor's appointment, internet contract, yoga class, flight to London, lunch reservation, language course,
        museum visit, package delivery, parking permit, video subscription, weekly groceries, driving lesson,
        massage appointment, football tickets, cruise, painting class, furniture order
    """,
    "please_repair": """
        bicycle, watch, washing machine, phone, roof, camera, dishwasher, laptop, printer, radio, piano, guitar,
        table, door, window, boat, motorcycle, truck, fridge, oven, toaster, kettle, lamp, heater, television,
        clock, shoes, umbrella, glasses, sofa, desk, sink, bathtub, lawn mower, violin, scooter, vacuum cleaner,
        microwave, doorbell, mirror, freezer, headphones, coffee machine, bookshelf
    """,
    "please_deliver": """
        a pizza, flowers, two sandwiches, a sofa, milk, my package, a newspaper, a birthday cake, ten eggs,
        fresh bread, a new bed, my suitcase, a Christmas tree, three books, a box of apples, a letter, a salad,
        two chairs, a lamp, a bicycle, lunch, breakfast, a bag of rice, a new phone, a carpet, cheese, fresh fish,
        a table, ice cream, a bottle of water, paint, some fruit, vegetables, a large mirror, my shoes,
        a television, coffee, a soup, garden tools, a gift, two pillows, a desk, a printer, chocolates
    """,
    "first_letter": """
        table, orange, flower, house, music, doctor, winter, river, bread, cat, window, lemon, pencil, yellow,
        mountain, summer, kitchen, bridge, letter, school, market, button, candle, silver, dragon, jacket, kettle,
        ladder, mirror, needle, paper, salad, ticket, umbrella, village, water, bottle, desert, farmer, hammer,
        king, tiger, dinner, horse
    """,
}


def fillers(name: str) -> list[str]:
    return [" ".join(filler.split()) for filler in FILLERS[name].split(",")]


def prompt(name: str, filler: str) -> str:
    template = TEMPLATES[name]
    parts = filler.split() if template.count("{}") > 1 else [filler]
    return template.format(*parts)


def rows(held_out: bool) -> list[dict]:
    """Rows of one split, template by template in turn, so that any prefix of the file is a mixture."""
    by_template = {
        name: [f for i, f in enumerate(fillers(name)) if (i % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1) == held_out]
        for name in TEMPLATES
    }
    longest = max(map(len, by_template.values()))
    return [
        {"source": name, "messages": [{"role": "user", "content": prompt(name, kept[i])}]}
        for i in range(longest)
        for name, kept in by_template.items()
        if i < len(kept)
    ]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for file_name, held_out in (("prompts.jsonl", False), ("heldout_prompts.jsonl", True)):
        lines = [json.dumps(row) + "\n" for row in rows(held_out)]
        (folder / file_name).write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{folder / file_name}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
